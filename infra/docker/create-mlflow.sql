-- Runs once, in a new cluster: the image itself makes the database of Prefect alone.
CREATE DATABASE mlflow;
