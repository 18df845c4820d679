"""`report.html`: a run on one page that needs nothing but a browser."""
