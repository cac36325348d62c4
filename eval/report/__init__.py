"""The report of an evaluation: tables, plots and HTML pages."""
