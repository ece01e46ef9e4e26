"""Configuration: the schema, the reader and the layers."""
