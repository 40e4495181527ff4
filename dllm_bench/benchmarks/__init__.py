"""Requests and how their answers are graded."""
