"""The suite itself on trial: what it says of backends that are broken, absent, silent, or not even Python."""
