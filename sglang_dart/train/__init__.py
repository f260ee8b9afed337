"""The trainer: data from a target, drafters from data."""
