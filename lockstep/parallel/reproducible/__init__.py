"""The same bits on any layout: the order of additions, an exact norm, and required settings."""
