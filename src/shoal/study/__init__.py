"""The study: steps to a goal against batch size, every batch size tuned on its own."""
