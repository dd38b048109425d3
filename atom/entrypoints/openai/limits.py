"""Ceilings of a request, in one place: whatever a client may choose has a bound here, in
``SamplingParams`` or in ``Guide``.
"""

MAX_BODY_BYTES = 32 * 2**20
MAX_JSON_DEPTH = 64  # of free-form values: schemas, tool arguments, template variables
MAX_PROMPTS = 512  # prompts of one completions request
MAX_ANSWERS = 1024  # prompts x max(n, best_of)
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 4096  # of one message
MAX_ROLE_CHARS = 64
MAX_LABEL_CHARS = 512  # user, and each key and value of metadata
MAX_METADATA = 16
MAX_STOP_CHARS = 1024  # a stop string or bad word
MAX_STOP_TOKEN_IDS = 64
MAX_COMPLETION_LOGPROBS = 5
MAX_TOP_LOGPROBS = 20
MAX_SALT_CHARS = 256
MAX_PRIORITY = 1000
MAX_TOP_K = 2**31 - 1
MAX_TOOLS = 512
MAX_TOOL_NAME_CHARS = 128
MAX_TOOL_BYTES = 2**20  # all tools of a request together, as JSON
MAX_TOOL_CALLS = 512  # of one message
MAX_TEMPLATE_KWARGS_BYTES = 2**16
MAX_DETOKENIZE = 2**20  # token ids
