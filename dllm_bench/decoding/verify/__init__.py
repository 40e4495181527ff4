"""Verification rules: which proposed tokens the target keeps; both keep its output law."""
