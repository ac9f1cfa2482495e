"""Many-rank test harness and contract classes for Colossal plugins."""
