"""What every study shares: jobs, results, statistics, pages."""
