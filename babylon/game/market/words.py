"""Company names, tickers, headlines and rumours from which scenarios are made."""

from babylon.game.market.amm import Side

COMPANIES = ("OpnAI", "TeslAI", "Nvidiot", "Macrohard", "Gaggle", "Amazen", "Mettle", "Appel")
TICKERS = ("OPNAI", "TSLAI", "NVDT", "MCRH", "GAGL", "AMZN", "METL", "APPL")  # of the companies
EVENTS = ("ship", "win the vote", "beat estimates", "get approval", "sign the deal", "cut prices")
GOOD_NEWS = (
    "insiders confirm it",
    "sources expect success",
    "officials are positive",
    "a leak says yes",
    "the team celebrates early",
    "analysts raise the odds",
)
BAD_NEWS = (
    "insiders deny it",
    "sources expect failure",
    "officials are negative",
    "a leak says no",
    "the team cancels the party",
    "analysts cut the odds",
)
NEWS = {Side.YES: GOOD_NEWS, Side.NO: BAD_NEWS}
PERP_NEWS = {
    Side.YES: (
        "demand beats forecasts",
        "insiders are buying",
        "a large fund builds a stake",
        "analysts raise the target",
        "a leak shows record sales",
        "orders pour in",
    ),
    Side.NO: (
        "demand misses forecasts",
        "insiders are selling",
        "a large fund leaves",
        "analysts cut the target",
        "a leak shows falling sales",
        "orders are cancelled",
    ),
}
AUTHORS = ("chartwizard", "moon_maxi", "quiet_quant", "doomer_dan", "tape_reader")
RUMOURS = {
    Side.YES: ("I am all in on this", "everybody I ask says yes", "up only", "trust me, it is on"),
    Side.NO: (
        "this will end in tears",
        "nobody believes it",
        "down it goes",
        "trust me, it is off",
    ),
}
