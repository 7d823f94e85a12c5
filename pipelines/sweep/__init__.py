"""`posttrain sweep`: the variants of a config, run as branches of one DAG and compared."""
