"""The heart of Colossal: plugin registry, plan, parameter table, collectives, flat buffers and the Booster."""
