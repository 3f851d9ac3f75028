"""Decisions you can trust from variational autoencoders."""
