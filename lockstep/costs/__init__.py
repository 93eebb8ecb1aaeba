"""Computes the costs of steps without torch: devices and links, collectives over them, and tasks on streams."""
