"""Verification: which draft tokens are accepted; both rules keep the output distribution."""
