"""KL estimators."""
