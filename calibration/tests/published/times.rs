//! The published measurements, as kernels and seconds.

use narrows_calibration::measurements::{MeasuredQuantity, priced_kernels, shipped};
use narrows_cost_model::Prices;
use narrows_cost_model::profile::preset;
use narrows_plan::{DType, Kernel};

/// A measured time of kernels that ran one after the other.
pub struct PublishedTime {
    pub name: String,
    /// Kernels, with the number of times that each ran.
    pub kernels: Vec<(Kernel, f64)>,
    pub seconds: f64,
}

impl PublishedTime {
    /// The predicted time, in seconds.
    pub fn price(&self, prices: &Prices) -> f64 {
        self.kernels.iter().map(|(kernel, times)| prices.kernel_time(kernel).0 * times).sum()
    }

    /// price / measured − 1.
    pub fn error(&self, prices: &Prices) -> f64 {
        self.price(prices) / self.seconds - 1.0
    }
}

/// The measurements by table.
pub struct PublishedTables {
    pub products: Vec<PublishedTime>,
    pub utilisation: Vec<PublishedTime>,
    pub grouped_products: Vec<PublishedTime>,
    pub all_reduces: Vec<PublishedTime>,
    pub grouped_all_reduces: Vec<PublishedTime>,
}

pub fn load() -> PublishedTables {
    PublishedTables {
        products: table("products"),
        utilisation: table("utilisation"),
        grouped_products: table("grouped products"),
        all_reduces: table("all-reduces"),
        grouped_all_reduces: table("grouped all-reduces"),
    }
}

/// A table of the shipped measurements.
fn table(name: &str) -> Vec<PublishedTime> {
    let profile = preset("a100-80gb").unwrap();
    let file = shipped().unwrap().remove(0);
    let rows = file.measurements.iter().filter(|row| row.table == name);
    let published = rows.map(|row| {
        let MeasuredQuantity::Kernels(runs) = &row.measured else { panic!("{name} are kernels") };
        let (kernels, seconds) =
            (priced_kernels(runs, row.mesh, DType::Bf16), row.measured_s(&profile));
        PublishedTime { name: row.name.clone(), kernels, seconds }
    });
    published.collect()
}
