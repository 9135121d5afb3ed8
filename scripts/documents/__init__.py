"""What docs/ shows: pictures and tables on paper."""
