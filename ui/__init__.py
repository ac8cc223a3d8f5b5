"""The page: everything a person sees. Talks to `specdec` by its public names only."""
