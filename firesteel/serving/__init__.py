"""Serving a packaged drafter with a server that others run: its command, and the check that it accepts what was promised."""
