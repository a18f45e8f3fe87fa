"""Documents, chunks and jobs in PostgreSQL, searched by pgvector and by full text. See `docs/design.md`."""
