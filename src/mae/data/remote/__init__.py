"""Files behind a URL: fetched, verified, cached."""
