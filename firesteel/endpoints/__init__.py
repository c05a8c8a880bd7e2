"""Which of several servers is asked next: back-off, lateness, budgets, and the list of them that may change while a run goes on."""
