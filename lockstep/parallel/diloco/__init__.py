"""Local updates: workers that train alone, and synchronize every H steps."""
