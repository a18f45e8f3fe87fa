"""One chat as a file that anybody can read without a server: `page` as HTML, `markdown` as text."""
