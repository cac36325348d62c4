"""What a run shows: tables, plots and HTML pages."""
