"""`edge0 serve`: one model behind the HTTP interface that OpenAI's clients speak.

A request's way: guards -> requests -> conversation -> queue -> worker -> answer -> sse.
"""
