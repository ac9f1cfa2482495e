"""The part of core that imports torch: processes, collectives, the table, flat buffers and the Booster."""
