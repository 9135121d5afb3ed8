"""The page that shows a run: its rounds step by step, why it is exact, and what it buys."""
