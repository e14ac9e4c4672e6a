"""Typed, strict configuration: the schema, its loader, and the YAML files by purpose."""
