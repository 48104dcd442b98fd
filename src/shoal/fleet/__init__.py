"""What a user's loop talks to, and the supervisor that starts it."""
