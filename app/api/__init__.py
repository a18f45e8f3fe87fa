"""The routes of `/api`: chats, documents, collections, jobs, search and tools. Users see each other nowhere here."""
