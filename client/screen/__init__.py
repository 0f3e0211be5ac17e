"""What the installed client draws on the whole screen; the client of sandboxes has none of it."""
