"""What steps cost: devices and links, collectives over them, and a step as tasks on streams; all without torch."""
