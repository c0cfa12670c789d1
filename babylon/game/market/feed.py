"""The social feed of a market: posts of players and non-players, and their comments."""

from dataclasses import dataclass, field

MAX_CONTENT = 280  # characters


@dataclass(slots=True)
class FeedComment:
    author: str
    text: str


@dataclass(slots=True)
class FeedPost:
    """A post. Ids are p1, p2, ... in the order of posting."""

    post_id: str
    author: str
    text: str
    tick: int
    comments: list[FeedComment] = field(default_factory=list)

    def comment(self, author: str, text: str) -> None:
        self.comments.append(FeedComment(author, text))


@dataclass(slots=True)
class Feed:
    posts: list[FeedPost] = field(default_factory=list)

    def post(self, author: str, text: str, tick: int) -> FeedPost:
        post = FeedPost(f"p{len(self.posts) + 1}", author, text, tick)
        self.posts.append(post)
        return post

    def find(self, post_id: str) -> FeedPost | None:
        return next((post for post in self.posts if post.post_id == post_id), None)


def one_line(content: str) -> str:
    """Return the text on one line, printable characters only.

    A line break could pass for another line of the readers' prompts.
    """
    return " ".join("".join(c if c.isprintable() else " " for c in content).split())
