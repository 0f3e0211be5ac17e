"""What the installed client alone can do: each use of the one in sandboxes would pay for it."""
