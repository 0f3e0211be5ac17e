"""Commands that the installed client alone has: each use of the one in sandboxes would pay for
it."""
