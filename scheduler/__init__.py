"""The pure scheduling core of Slipstream (events in, commands out) and its actor shell."""
