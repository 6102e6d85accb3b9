"""Stands in for torch, which takes a second to import, in wardens whose executors do without it."""
