"""The four worlds of the tests; tests/README.md says which one a test needs."""
