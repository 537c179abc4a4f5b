"""HTML read back into a tree, strictly: an end tag without its start is an error. For tests of what we write."""

from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "input", "hr"}


class Node:
    """An element: tag, attributes, children (nodes and strings)."""

    def __init__(self, tag, attributes):
        self.tag, self.attributes, self.children = tag, dict(attributes), []

    def all(self, tag=None, cls=None):
        """Every element below with this tag and class."""
        found = []
        for child in self.children:
            if isinstance(child, Node):
                fits = tag in (None, child.tag) and (cls is None or cls in child.attributes.get("class", "").split())
                found += [child] * fits + child.all(tag, cls)
        return found

    @property
    def text(self):
        """All text below, whitespace collapsed."""
        parts = [c if isinstance(c, str) else c.text for c in self.children]
        return " ".join(" ".join(parts).split())


class _Parser(HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.root = Node("", {})
        self.open = [self.root]

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs), f"<{tag}> has an attribute twice"
        node = Node(tag, attrs)
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag, attrs):
        self.open[-1].children.append(Node(tag, attrs))

    def handle_endtag(self, tag):
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data):
        self.open[-1].children.append(data)


def parse(text):
    """The tree of a whole page or a fragment; fails on tags that do not match."""
    parser = _Parser()
    parser.feed(text)
    parser.close()
    assert len(parser.open) == 1, f"<{parser.open[-1].tag}> is never closed"
    return parser.root
