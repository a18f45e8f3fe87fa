"""Search: the words of titles (their message_id is null) and messages."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision: str | None = "0004"


def upgrade() -> None:
    op.create_table(
        "texts",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("chat_id", sa.Text, nullable=False),
        sa.Column("message_id", sa.Text, unique=True),
    )
    title = sa.text("message_id IS NULL")
    op.create_index("texts_title", "texts", ["chat_id"], unique=True, sqlite_where=title, postgresql_where=title)
    op.execute("INSERT INTO texts (chat_id) SELECT id FROM chats")
    op.execute("INSERT INTO texts (chat_id, message_id) SELECT chat_id, id FROM messages")
    for statement in _SQLITE:
        op.execute(statement)


# SQLite's full-text index, and the triggers that keep it.
_SQLITE = (
    """CREATE VIRTUAL TABLE text_index USING fts5 (
        text, tokenize = 'unicode61 remove_diacritics 2', prefix = '2 3')""",
    """INSERT INTO text_index (rowid, text)
        SELECT texts.id, coalesce(messages.content, chats.title) FROM texts
        JOIN chats ON chats.id = texts.chat_id LEFT JOIN messages ON messages.id = texts.message_id""",
    """CREATE TRIGGER chat_added AFTER INSERT ON chats BEGIN
        INSERT INTO texts (chat_id) VALUES (new.id);
        INSERT INTO text_index (rowid, text)
            SELECT id, new.title FROM texts WHERE chat_id = new.id AND message_id IS NULL; END""",
    """CREATE TRIGGER chat_renamed AFTER UPDATE OF title ON chats WHEN old.title <> new.title BEGIN
        UPDATE text_index SET text = new.title
            WHERE rowid = (SELECT id FROM texts WHERE chat_id = new.id AND message_id IS NULL); END""",
    """CREATE TRIGGER chat_deleted AFTER DELETE ON chats BEGIN
        DELETE FROM text_index
            WHERE rowid = (SELECT id FROM texts WHERE chat_id = old.id AND message_id IS NULL);
        DELETE FROM texts WHERE chat_id = old.id AND message_id IS NULL; END""",
    """CREATE TRIGGER message_added AFTER INSERT ON messages BEGIN
        INSERT INTO texts (chat_id, message_id) VALUES (new.chat_id, new.id);
        INSERT INTO text_index (rowid, text) SELECT id, new.content FROM texts WHERE message_id = new.id; END""",
    """CREATE TRIGGER message_changed AFTER UPDATE OF content ON messages WHEN old.content <> new.content BEGIN
        UPDATE text_index SET text = new.content WHERE rowid = (SELECT id FROM texts WHERE message_id = new.id);
        END""",
    """CREATE TRIGGER message_deleted AFTER DELETE ON messages BEGIN
        DELETE FROM text_index WHERE rowid = (SELECT id FROM texts WHERE message_id = old.id);
        DELETE FROM texts WHERE message_id = old.id; END""",
)
