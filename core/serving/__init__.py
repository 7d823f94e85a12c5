"""Model servers: processes that cannot outlive us, requests that cannot get lost, weight files."""
