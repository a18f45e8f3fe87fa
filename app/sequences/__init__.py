"""The engine's sequences for remote programs: leased for a time, counted for each user."""
