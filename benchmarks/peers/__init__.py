"""Training loops in the idiom of other libraries' own examples, on small data that is made here."""
