"""The ranks: how they find each other, their process group, its collectives and its mesh."""
