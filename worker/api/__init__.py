"""What a script may call itself: watch(), detect_overflow(), DebugUnderflowOverflow."""
