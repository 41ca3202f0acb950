"""The functions and classes that a script may use: watch(), detect_overflow(), DebugUnderflowOverflow."""
