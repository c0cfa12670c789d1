"""The social feed of a market: what strangers and players post, and the comments below."""

from dataclasses import dataclass, field

MAX_CONTENT = 280  # characters


@dataclass(slots=True)
class FeedComment:
    author: str
    text: str


@dataclass(slots=True)
class FeedPost:
    """``post_id`` is p1, p2, ... in the order of posting."""

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
    """As it is shown to others: a line break could pass for another line of their prompt."""
    return " ".join("".join(c if c.isprintable() else " " for c in content).split())
