"""Evaluation: tasks, metrics, the sweep over methods and budgets, and the report."""
