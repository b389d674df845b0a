"""The embedded tiny checkpoint (data only)."""
