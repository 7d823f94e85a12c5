-- Runs once, in a new cluster. The image creates the Prefect database itself.
CREATE DATABASE mlflow;
