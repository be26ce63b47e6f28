"""opgraft grafts hardware that no inference engine has in its tree onto that engine's operators."""
